"""What every room uses: the cache folder, compiled code, staging arrays, a running mean."""
