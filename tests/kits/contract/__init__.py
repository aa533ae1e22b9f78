"""What the tests of worlds from the outside share: members, launchers, nodes, what they call, and examples."""
