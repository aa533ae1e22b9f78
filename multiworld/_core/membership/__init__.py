"""Who is a member of which generation."""
