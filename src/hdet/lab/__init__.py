"""Train and show: tasks, training, page, command line. The library never imports it."""
