"""Operations under way: each member's last ones, and which member the others wait for."""
