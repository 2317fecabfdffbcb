// Hello, Settee: one durable document through gocb.
package main

import (
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"github.com/couchbase/gocb/v2"
)

func main() {
	cluster, err := gocb.Connect("couchbase://"+server(), gocb.ClusterOptions{
		Authenticator: gocb.PasswordAuthenticator{Username: "Administrator", Password: password()},
	})
	check(err)
	bucket := cluster.Bucket("default")
	check(bucket.WaitUntilReady(10*time.Second, nil))
	docs := bucket.DefaultCollection()

	stored, err := docs.Upsert("hello", map[string]string{"from": "go"}, &gocb.UpsertOptions{
		DurabilityLevel: gocb.DurabilityLevelPersistToMajority,
	})
	check(err)
	fmt.Println("on disk, cas", stored.Cas())

	got, err := docs.Get("hello", nil)
	check(err)
	var document map[string]string
	check(got.Content(&document))
	fmt.Println("read back", document)
	check(cluster.Close(nil))
}

func server() string {
	if address := os.Getenv("SETTEE_KV"); address != "" {
		return address
	}
	return "127.0.0.1:11210"
}

func password() string {
	if password := os.Getenv("SETTEE_PASSWORD"); password != "" {
		return password
	}
	text, err := os.ReadFile("settee-data/password")
	check(err)
	return strings.TrimSpace(string(text))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
