"""The search for the learning rate before a run: decisions, the driver, what was found."""
