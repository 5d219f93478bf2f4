"""What is run and looked at: experiments, the lens on your own data, checkpoints, reports."""
