"""Orders of examples as pure functions of (seed, epoch) and place: one dataset, or a mixture."""

from torch_collate_kit.loading.orders.mixture import Mixture

__all__ = ["Mixture"]
