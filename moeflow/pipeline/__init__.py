"""The order of work inside a pass, as data: generators of tasks that touch no tensor."""
