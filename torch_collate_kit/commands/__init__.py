"""The commands of ``python -m torch_collate_kit``, by what they show."""
