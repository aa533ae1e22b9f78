"""The defect matrix: scenario x mode x build x backend, run on the test bed, kept as JSON and shown as a page."""
