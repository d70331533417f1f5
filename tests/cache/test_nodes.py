"""The index: keys, the nodes they stand for, and how these follow each other."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.cache.nodes import NOWHERE, NodeTable, grown
from penstock.errors import InvariantViolation


def keys(count: int, *, name: str = "k") -> list[bytes]:
    return [f"{name}{position}".encode().rjust(16, b".") for position in range(count)]


def place(table: NodeTable, nodes: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    table.add_copies(nodes)


@pytest.fixture
def table() -> NodeTable:
    return NodeTable(capacity=4)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 40, 200])
def test_a_known_chain_is_matched_to_its_end(table: NodeTable, count: int) -> None:
    chain = keys(count)
    nodes = table.add_chain(chain, parent=NOWHERE, tenant=0)

    assert table.match(chain).tolist() == nodes.tolist()


@pytest.mark.parametrize("count", [5, 17, 100])
def test_a_match_ends_where_the_prompt_goes_on_differently(table: NodeTable, count: int) -> None:
    nodes = table.add_chain(keys(count), parent=NOWHERE, tenant=0)

    for shared in range(count + 1):
        prompt = keys(count)[:shared] + keys(30, name="other")
        assert table.match(prompt).tolist() == nodes[:shared].tolist()


@pytest.mark.parametrize("count", [5, 17, 100])
def test_a_prompt_that_ends_early_is_matched_to_its_end(table: NodeTable, count: int) -> None:
    nodes = table.add_chain(keys(count), parent=NOWHERE, tenant=0)

    for length in range(count + 1):
        assert table.match(keys(count)[:length]).tolist() == nodes[:length].tolist()


def test_a_chain_that_was_added_in_pieces_is_matched_as_one(table: NodeTable) -> None:
    chain = keys(60)
    parent, nodes = NOWHERE, []
    for first in range(0, 60, 7):
        table.add_chain(keys(3, name=f"between{first}-"), parent=NOWHERE, tenant=0)
        piece = table.add_chain(chain[first : first + 7], parent=parent, tenant=0)
        parent = int(piece[-1])
        nodes += piece.tolist()

    assert table.match(chain).tolist() == nodes


def test_two_prompts_with_a_common_start_are_told_apart(table: NodeTable) -> None:
    stem = table.add_chain(keys(20), parent=NOWHERE, tenant=0)
    left = table.add_chain(keys(20, name="left"), parent=int(stem[-1]), tenant=0)
    right = table.add_chain(keys(20, name="right"), parent=int(stem[-1]), tenant=0)

    found_left = table.match(keys(20) + keys(20, name="left"))
    found_right = table.match(keys(20) + keys(20, name="right"))

    assert found_left.tolist() == [*stem.tolist(), *left.tolist()]
    assert found_right.tolist() == [*stem.tolist(), *right.tolist()]


@pytest.mark.parametrize("length", [6, 30])
def test_blocks_behind_an_unknown_one_are_not_matched(table: NodeTable, length: int) -> None:
    chain = keys(length)
    table.add_chain(chain[:2], parent=NOWHERE, tenant=0)
    table.add_chain(chain[3:], parent=NOWHERE, tenant=0)

    assert len(table.match(chain)) == 2


def test_numbers_of_removed_nodes_are_matched_with_their_new_keys(table: NodeTable) -> None:
    old = table.add_chain(keys(30, name="old"), parent=NOWHERE, tenant=0)
    table.remove_if_useless(int(old[-1]))
    first = table.add_chain(keys(20), parent=NOWHERE, tenant=0)
    second = table.add_chain(keys(20, name="then"), parent=int(first[-1]), tenant=0)

    prompt = keys(20) + keys(20, name="then")

    assert table.match(prompt).tolist() == [*first.tolist(), *second.tolist()]
    assert len(table.match(keys(30, name="old"))) == 0


def test_a_key_leads_to_its_node_and_back(table: NodeTable) -> None:
    first, second = table.add_chain(keys(2), parent=NOWHERE, tenant=0).tolist()

    assert table.get(keys(2)[1]) == second
    assert table.key_of(first) == keys(2)[0]
    assert table.keys_of([second, first]) == keys(2)[::-1]


def test_an_unknown_key_has_no_node(table: NodeTable) -> None:
    assert table.get(b"unknown") == NOWHERE


def test_asking_for_the_key_of_an_unknown_node_is_our_defect(table: NodeTable) -> None:
    table.add_chain(keys(1), parent=NOWHERE, tenant=0)

    with pytest.raises(InvariantViolation, match="node 2 is not known"):
        table.key_of(2)
    with pytest.raises(InvariantViolation, match="node 2 is not known"):
        table.keys_of([0, 2])


def test_adding_a_known_key_again_is_our_defect(table: NodeTable) -> None:
    table.add_chain(keys(1), parent=NOWHERE, tenant=0)

    with pytest.raises(InvariantViolation, match="some were known already"):
        table.add_chain(keys(2), parent=NOWHERE, tenant=0)


def test_blocks_added_together_follow_each_other(table: NodeTable) -> None:
    nodes = table.add_chain(keys(3), parent=NOWHERE, tenant=5)

    assert table.parent[nodes].tolist() == [NOWHERE, *nodes[:2].tolist()]
    assert table.child_count[nodes].tolist() == [1, 1, 0]
    assert table.tenant[nodes].tolist() == [5, 5, 5]


def test_a_chain_can_follow_a_known_block(table: NodeTable) -> None:
    stem = table.add_chain(keys(1), parent=NOWHERE, tenant=0)

    for name in ("left", "right"):
        table.add_chain(keys(2, name=name), parent=int(stem[0]), tenant=0)

    assert table.child_count[stem].tolist() == [2]


def test_a_new_node_starts_without_a_past(table: NodeTable) -> None:
    (old,) = table.add_chain(keys(1), parent=NOWHERE, tenant=3)
    table.hits[old], table.priority[old], table.pins[old] = 9, 9, 9
    table.remove_if_useless(int(old))

    new = table.add_chain(keys(table.capacity, name="new"), parent=NOWHERE, tenant=0)

    assert old in new
    assert table.hits[old] == table.priority[old] == table.pins[old] == table.tenant[old] == 0


def test_chains_are_numbered_one_by_one_also_after_others_left_in_pieces(table: NodeTable) -> None:
    chains: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    added = breaks = 0
    for turn in range(300):
        nodes = table.add_chain(keys(10 + turn % 37, name=f"{turn}-"), parent=NOWHERE, tenant=0)
        added += len(nodes)
        breaks += int(np.count_nonzero(np.diff(nodes) != 1))
        chains.append(nodes)
        leaving = len(nodes) if turn > 40 else 0
        while leaving:
            chains[0], end = chains[0][:-leaving], chains[0][-leaving:]
            table.remove_all(end[::-1], table.keys_of(end[::-1].tolist()))
            leaving -= len(end)
            if not len(chains[0]):
                chains.pop(0)

    assert breaks < added / 50


def test_a_node_without_copies_and_followers_is_removed_with_the_hollow_ones_before_it(
    table: NodeTable,
) -> None:
    nodes = table.add_chain(keys(3), parent=NOWHERE, tenant=0)
    place(table, nodes[:1])

    removed = table.remove_if_useless(int(nodes[2]))

    assert removed == [keys(3)[2], keys(3)[1]]
    assert table.match(keys(3)).tolist() == nodes[:1].tolist()
    assert table.child_count[nodes[0]] == 0


def test_a_node_with_a_follower_stays_though_it_is_hollow(table: NodeTable) -> None:
    nodes = table.add_chain(keys(2), parent=NOWHERE, tenant=0)
    place(table, nodes[1:])

    removed = table.remove_if_useless(int(nodes[0]))

    assert removed == []
    assert table.hollow_count() == 1


def test_a_node_with_a_copy_stays(table: NodeTable) -> None:
    nodes = table.add_chain(keys(1), parent=NOWHERE, tenant=0)
    place(table, nodes)

    removed = table.remove_if_useless(int(nodes[0]))

    assert removed == []
    assert len(table) == 1


def test_a_whole_chain_is_removed_at_once(table: NodeTable) -> None:
    nodes = table.add_chain(keys(5), parent=NOWHERE, tenant=0)

    left = table.remove_all(nodes, table.keys_of(nodes.tolist()))

    assert left == []
    assert len(table) == 0
    assert table.child_count[nodes].tolist() == [0] * 5


def test_removing_the_end_of_a_chain_names_the_hollow_block_before_it(table: NodeTable) -> None:
    nodes = table.add_chain(keys(4), parent=NOWHERE, tenant=0)
    place(table, nodes[:1])

    left = table.remove_all(nodes[2:], table.keys_of(nodes[2:].tolist()))

    assert left == [int(nodes[1])]
    assert len(table.match(keys(4))) == 2


def test_nothing_is_removed_at_once_when_another_block_follows(table: NodeTable) -> None:
    nodes = table.add_chain(keys(4), parent=NOWHERE, tenant=0)
    place(table, nodes[3:])
    followers_before = table.child_count[nodes].tolist()

    left = table.remove_all(nodes[:3], table.keys_of(nodes[:3].tolist()))

    assert sorted(left) == sorted(nodes[:3].tolist())
    assert len(table) == 4
    assert table.child_count[nodes].tolist() == followers_before


def test_the_table_grows_and_keeps_what_it_knows(table: NodeTable) -> None:
    first = table.add_chain(keys(3), parent=NOWHERE, tenant=1)
    table.hits[first] = 7

    second = table.add_chain(keys(50, name="more"), parent=int(first[-1]), tenant=2)

    assert table.capacity >= 53
    assert len(set(first.tolist()) | set(second.tolist())) == 53
    assert table.hits[first].tolist() == [7, 7, 7]
    assert table.match(keys(3)).tolist() == first.tolist()


def test_an_array_grows_with_the_filling_it_is_given() -> None:
    array = np.array([1, 2], dtype=np.int32)

    larger = grown(array, 4, fill=NOWHERE)

    assert larger.tolist() == [1, 2, NOWHERE, NOWHERE]
    assert larger.dtype == np.int32
