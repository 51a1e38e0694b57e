"""How much of what is proposed is verified: costs, benefits, tree size, back-off."""
