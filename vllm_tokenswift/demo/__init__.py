"""``make demo``: a real model writes a long text twice, plain and with TokenSwift."""
