"""What exploring weight decay in the run is worth: problems that were split before anything was tuned."""
