"""What trains and shows by itself: tasks, training, page, command line. The library never imports it."""
