"""What TokenSwift did over the length of a finished generation, and what it cost."""
