"""Other inference engines, run on the same prompts as YALIS so that the ratio compares like with like."""
