"""`paceline report`: an HTML page about one or more runs. It reads run folders and starts no process."""
