"""What the members of a world are doing: each one's last operations, and which member the others wait for."""
