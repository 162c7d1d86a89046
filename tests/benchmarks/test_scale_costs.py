"""The measurement of a core's costs: a real core with workers that answer at once."""

from __future__ import annotations

import pytest

from tests.benchmarks.loading import load

costs = load("scale_costs")


def test_a_core_with_two_ranks_runs_rows_and_requests() -> None:
    result = costs.decoding(3, 2, 0.2)
    assert (result["rows"], result["ranks"]) == (3, 2)
    assert result["row_seconds"] > 0.0 and result["rows_per_s"] == pytest.approx(1 / result["row_seconds"])
    assert result["reached_rows_per_s"] > 0.0


def test_messages_go_through_a_worker_socket_and_back() -> None:
    result = costs.socket_costs(200)
    assert result["plan_bytes"] > costs.RANK_ROWS and result["result_bytes"] > costs.RANK_ROWS
    assert result["delay"] > 0.0 and result["messages_per_s"] > 0.0


def test_a_line_through_points_on_a_line() -> None:
    assert costs.line([(x, 3.0 + 2.0 * x) for x in (16, 64, 1024)]) == pytest.approx((3.0, 2.0))


def test_a_line_that_would_begin_below_zero_begins_there() -> None:
    first, slope = costs.line([(1.0, 1.0), (2.0, 4.0)])
    assert first == 0.0 and 1.0 < slope < 2.0
