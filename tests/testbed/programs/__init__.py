"""Programs that ranks run: plain functions of a `bed.rank.Rank`."""
