"""Train a task from the first step to the last: settings, folder, runner, sweep, a look at the machine."""
