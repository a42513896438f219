"""What each page shows and does."""
