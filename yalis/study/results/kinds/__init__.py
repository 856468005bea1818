"""One module for each kind of result; `registry.py` finds them."""
