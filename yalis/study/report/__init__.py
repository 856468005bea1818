"""The report: results as one HTML page with plots, tables and the commands that made them."""
