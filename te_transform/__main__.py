"""`python -m te_transform` is `te-transform`."""

from te_transform.cli import main

raise SystemExit(main())
