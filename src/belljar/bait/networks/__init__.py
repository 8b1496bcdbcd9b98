"""What keeps network classes apart, and how full a way out is."""
