"""Whether processes are alive, and what traffic workers have earned: pure judges, and the watcher that feeds one."""
