"""Engine: the Executable, the phases of a step, and recovery if ranks are lost or join."""
