"""A job from files of other tools, and what of them it leaves out.

`files` reads them; `statements` says what each key means for a job, by `table`; `resolve` decides between
statements of one key; `suspects` finds what may decide a part of the job and is not understood; `defaults`
says what the tools do where no file says it; `job` puts it together.
"""

from shardwise.lint.foreign.job import shown, translation
from shardwise.lint.foreign.table import TABLE

__all__ = ["TABLE", "shown", "translation"]
