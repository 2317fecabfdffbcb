package histories

import (
	"fmt"
	"os"
	"testing"
)

// TestMain starts the tests again, in a network namespace of their own.
func TestMain(m *testing.M) {
	if os.Getenv(leftSaid) == "" {
		if code, err := again(); err == nil {
			os.Exit(code)
		} else {
			withoutNetwork = fmt.Sprintf("no network namespace can be made here: %v", err)
		}
	} else if err := layCables(); err != nil {
		withoutNetwork = fmt.Sprintf("no bridge can be made here: %v", err)
	} else {
		withoutNetwork = ""
	}
	seed, err := theSeed()
	if err != nil {
		fmt.Printf("%s is no number: %v\n", seedSaid, err)
		os.Exit(2)
	}
	drawn = seed
	fmt.Printf("%s=%d draws the same load again\n", seedSaid, seed)
	os.Exit(m.Run())
}
