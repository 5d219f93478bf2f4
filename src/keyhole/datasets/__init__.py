"""Sets out of what people have: text, molecules, tables."""
