"""Windows of steps by loops: the next run of the order that fits, and the rows best fit opens."""

from __future__ import annotations


def best_fit_rows(lengths, capacity):
    """Number of rows that best fit decreasing opens, one piece after the other."""
    space = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, left in enumerate(space) if left >= length]
        if fitting:
            space[min(fitting, key=space.__getitem__)] -= length
        else:
            space.append(capacity - length)
    return len(space)


def windows(lengths, num_rows, capacity):
    """Where each window of an epoch of examples of these lengths, in order, stops."""
    stops = [0]
    while stops[-1] < len(lengths):
        rest = lengths[stops[-1] :]
        if best_fit_rows(rest, capacity) <= num_rows:  # the last window may be filled to the brim
            return [*stops[1:], len(lengths)]
        budget = max(capacity, num_rows * capacity * 995 // 1000)
        number = sum(sum(rest[: i + 1]) <= budget for i in range(len(rest)))
        while number > num_rows and best_fit_rows(rest[:number], capacity) > num_rows:
            surplus = best_fit_rows(rest[:number], capacity) - num_rows
            least = sum(rest[:number]) - max(1, surplus * capacity // 8)
            fewer = next(i for i in range(number) if sum(rest[: i + 1]) >= least)
            number = max(num_rows, min(number - 1, fewer))
        stops.append(stops[-1] + number)
    return stops[1:]
