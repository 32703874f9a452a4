"""Starting and ending of processes, and shared memory, on one machine."""
