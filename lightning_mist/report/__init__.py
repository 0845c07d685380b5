"""Plans for people to look at: pictures of a step, and a report in one page."""
