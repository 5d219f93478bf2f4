"""What goes in: sets with a query, samples of several sets, tokens, files and public data sets."""
