"""What is raised on every rank when any of them has failed."""


class RankFailure(RuntimeError):
    """At least one rank of the group failed; the message names the ranks and what each said."""
