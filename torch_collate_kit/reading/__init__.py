"""Reading: examples in any form, checked and looked at as columns."""
