"""Smoke tests of the scripts behind the README's figures."""

import experiment
import mechanism
import numpy as np
import phase_map
import pytest


def test_in_a_rollout_only_token_follows_the_gap_and_only_sequence_the_length(tmp_path):
    groups = {"guesser": mechanism.sample_groups("guesser", 12)}
    slopes = mechanism.draw(groups, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    by_gap, by_length = ({rule: slope[i] for rule, slope in slopes.items()} for i in (0, 1))
    assert by_gap.pop("token") > 0.1 and max(map(abs, by_gap.values())) < 1e-4
    assert by_length.pop("sequence") == pytest.approx(-1, abs=1e-4)
    assert max(map(abs, by_length.values())) < 1e-4


def test_the_phase_map_agrees_with_the_closed_form_far_from_the_boundary(tmp_path):
    assert phase_map.judge(True, 8, cv=0.05, g=2.5, n=5_000)[0] == "sequence"
    assert phase_map.judge(True, 8, cv=0.9, g=1.0, n=5_000)[0] == "token"
    phase_map.draw(tmp_path / "map.png", 1_000, phase_map.CVS[::9], phase_map.GAPS[::6])
    assert (tmp_path / "map.png").stat().st_size > 10_000


@pytest.mark.parametrize("cv, g", [(0.05, 0.35), (0.9, 2.8)])
def test_routes_have_the_wanted_gap_variation_and_pass_rate(cv, g):
    pi, lengths = phase_map.make_routes(cv, g)
    right, wrong = pi * phase_map.P_RIGHT, pi * (1 - phase_map.P_RIGHT)
    assert pi.sum() == pytest.approx(1) and right.sum() == pytest.approx(phase_map.PASS)
    assert wrong @ lengths / wrong.sum() / (right @ lengths / right.sum()) == pytest.approx(g)
    assert lengths[:5].std() / lengths[:5].mean() == pytest.approx(cv, abs=0.005)


def test_statistics_on_known_values():
    assert experiment.sign_flip_p(np.array([1.0, 2, 3])) == 1 / 8
    assert experiment.sign_flip_p(np.array([1.0, 2, -3])) == 5 / 8  # sums 0 0 2 4 6 of +-1 +-2 +-3
    assert experiment.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert experiment.holm([0.6, 0.5]) == pytest.approx([1, 1])
