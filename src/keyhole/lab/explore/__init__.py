"""`keyhole explore`: theory and experiment on one page in the browser."""
