"""What passes and the host cost on this machine, measured at start and kept."""
