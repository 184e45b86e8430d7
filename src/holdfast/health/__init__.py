"""Whether processes are alive: a pure judge, and the watcher that feeds it with beats and looks at /proc."""
