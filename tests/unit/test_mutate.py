"""The mutants of tests/mutate.py are told apart by name, and its list of equivalent ones names
mutants that exist.
"""

from tests.mutate import equivalents, mutants, sample


def test_names_tell_mutants_apart_and_the_equivalent_ones_exist() -> None:
    names = [mutant.name for mutant in mutants()]
    assert len(set(names)) == len(names)
    assert not equivalents().keys() - set(names)
    assert all(len(reason) > 20 for reason in equivalents().values())


def test_a_sample_stays_when_a_module_goes() -> None:
    every = mutants()
    drawn = sample(every, seed=3, count=50)
    kept = [mutant for mutant in drawn if mutant.file != drawn[0].file]
    assert sample([m for m in every if m.file != drawn[0].file], seed=3, count=len(kept)) == kept
