import numpy as np
import pytest
import torch
from baselines.gobo import GoboCodec, l1_centroids, outliers
from support.chains import encode, spec_of

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.schemes.base import Context


def test_outliers_are_those_of_low_log_density():
    # deviation 1: log density -4 lies at |z| = sqrt(2 (4 - ln sqrt(2 pi))) = 2.482
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    deviation = float(values.std())
    for threshold, distance in ((-4.0, 2.482), (-3.0, 2.040)):
        found = outliers(values, threshold, standardized=False)
        assert np.array_equal(found, np.abs(values - values.mean()) > distance * deviation) or (
            abs(found.mean() - np.mean(np.abs(values) > distance)) < 1e-4
        )
    # in smaller units the density is higher and outliers are fewer, unless it is standardized
    small = values * np.float32(0.03)
    assert outliers(small, -4.0, standardized=False).mean() < 1e-3
    assert np.array_equal(outliers(small, -4.0, standardized=True), outliers(values, -4.0, standardized=True))
    assert not outliers(np.ones(9, np.float32), -4.0, standardized=False).any()


def test_centroids_by_hand():
    # two bins of equal population: {0, 0, 1}, {5, 6, 7}; nothing moves any more
    assert l1_centroids(np.array([6, 0, 5, 0, 1, 7], np.float32), 2).tolist() == pytest.approx([1 / 3, 6])
    # equal population puts 5 with 6: the nearest centroid draws it over
    values = np.array([0, 0, 0, 0, 4, 5, 6, 6], np.float32)
    assert l1_centroids(values, 2).tolist() == [0.0, 5.25]
    assert l1_centroids(np.ones(3, np.float32), 8).tolist() == [1.0]


def test_outliers_are_kept_exactly_and_others_by_the_nearest_centroid():
    weight = torch.randn(60, 60, generator=torch.Generator().manual_seed(0)) * 0.03
    weight[3, 4], weight[5, 6] = 1.2345678, -0.987654
    coded = encode(GoboCodec(), weight, spec_of(weight), Context())
    assert coded.value[3, 4] == weight[3, 4]
    assert coded.value[5, 6] == weight[5, 6]
    centroids = torch.from_numpy(np.frombuffer(coded.encoded.sections["centroids"], "<f4").copy())
    assert centroids.numel() == 8
    group = torch.from_numpy(coded.planes["levels"]).reshape(60, 60) > 0
    nearest = (weight[group][:, None] - centroids).abs().min(dim=1).values
    assert torch.equal((coded.value - weight)[group].abs(), nearest)


def test_what_has_no_group_is_refused():
    weight = torch.tensor([[-30.0, 30.0]])
    with pytest.raises(CannotRepresentError, match="outliers"):
        encode(GoboCodec(), weight, spec_of(weight), Context())
