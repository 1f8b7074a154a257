"""What can go wrong in a browser, told apart by whose doing it is."""


class BrowserFault(Exception):
    """Browser, renderer or driver died: independent of the policy, the attempt is issued again."""


class PageTimeout(Exception):
    """A page did not answer within browser.action_timeout_s: the environment's doing, the group is dropped."""


class PageError(Exception):
    """The page refused a call (navigation refused, script error).  After an action: told to the agent."""


class TabClosed(PageError):
    """The call closed the tab that it was made in; another is open."""


class SiteBlocked(PageError):
    """The site kept the agent out before it began: the environment's doing, the group is dropped."""
