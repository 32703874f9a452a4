"""Handling of slow and lost devices (Malleus, section 6). `engine/` moves the state."""
