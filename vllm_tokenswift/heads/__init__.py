"""Self-drafting heads: the module, its checkpoint forms, and how they are trained."""
