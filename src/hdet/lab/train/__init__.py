"""Train a task from the first step to the last: settings, folder, runner, trainers."""
