"""Other people's projects with one word changed, beside DDP."""
