"""The chain that every paper shares: suite file -> runs -> records -> figures. Imports no paper."""
