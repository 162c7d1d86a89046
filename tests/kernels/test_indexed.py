"""The keys that an indexer chooses: the largest scores, and among equal ones the first."""

import torch

from pagewire.kernels.indexed import largest

INF = torch.inf


def test_the_largest_scores_and_of_equal_ones_the_first() -> None:
    scores = torch.tensor(
        [
            [3.0, 1.0, 4.0, 1.0, 5.0, 9.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [2.0, 7.0, 2.0, 2.0, -INF, -INF],
            [1.0, 2.0, -INF, -INF, -INF, -INF],  # fewer than are chosen: the others are not seen anyway
        ]
    )
    assert largest(scores, 3).tolist() == [[2, 4, 5], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert largest(scores, 3).dtype == torch.int32


def test_rows_are_chosen_alone() -> None:
    scores = (
        torch.randn(50, 300, generator=torch.Generator().manual_seed(0)).mul(4).round()
    )  # with many equal
    together = largest(scores, 64)
    assert torch.equal(together, torch.cat([largest(row[None], 64) for row in scores]))
    by_sorting = scores.sort(dim=1, descending=True, stable=True).indices[:, :64].sort(1).values
    assert torch.equal(together.long(), by_sorting)
