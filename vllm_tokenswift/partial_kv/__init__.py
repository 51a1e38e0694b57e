"""The dynamic partial-KV draft block table (paper, section "Dynamic KV Cache Management")."""
