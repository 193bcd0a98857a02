"""A batch for people to read: rows as text, HTML or a plot, and one row token by token."""
