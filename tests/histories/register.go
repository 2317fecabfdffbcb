// Package histories records what clients of a real cluster were told while nodes die, stand still or cannot reach each other,
// and checks that there is one order of all of it that explains every answer.
//
//	clients ──▶ history ──▶ per key: porcupine, the checker     is there an order?
//	                  └───▶ over all: nothing invented, one CAS a version, no node goes backwards
package histories

import (
	"errors"
	"fmt"
	"math"
	"sort"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// Kind is what a client asked of a key.
type Kind string

const (
	Get     Kind = "get"
	Replica Kind = "replica"
	Set     Kind = "set"
	Swap    Kind = "swap"
	Add     Kind = "add"
	Delete  Kind = "delete"
)

// Outcome is what the client knows afterwards.
type Outcome string

const (
	// Done: it was answered with success.
	Done Outcome = "done"
	// Refused: its condition did not hold, which says something about the document.
	Refused Outcome = "refused"
	// Failed: certainly nothing was done.
	Failed Outcome = "failed"
	// Ambiguous: it may have been done, or be done at any later time.
	Ambiguous Outcome = "ambiguous"
)

// Version is what a key holds: each write of a test writes another one. 0: there is no document.
type Version uint64

// Op is one request and what became of it.
type Op struct {
	Client int
	Node   string
	// Term counts the starts and losses of office of the node.
	Term int
	Key  string
	Kind Kind
	// Level is the durability level of a write.
	Level uint8
	// Writes is the version that a write leaves; 0 for a delete.
	Writes Version
	// Expects is what a swap wants to replace.
	Expects Version
	// Call and Return are nanoseconds since the test began. An ambiguous one has no Return.
	Call, Return int64
	Outcome      Outcome
	// Found is what a read saw.
	Found Version
	// Missing: a swap was refused because there is nothing.
	Missing bool
	Cas     uint64
	// IsStale: the node was being taken out of the map, or was out of it, when it answered: what it says of the present does
	// not count.
	IsStale bool
	Why     string
}

func (op Op) String() string {
	what := string(op.Kind)
	switch op.Kind {
	case Set, Add:
		what = fmt.Sprintf("%s(%d)", op.Kind, op.Writes)
	case Swap:
		what = fmt.Sprintf("swap(%d→%d)", op.Expects, op.Writes)
	}
	said := string(op.Outcome)
	if op.Outcome == Done && (op.Kind == Get || op.Kind == Replica) {
		said = fmt.Sprint(op.Found)
	}
	if op.Missing {
		said += " (missing)"
	}
	if op.IsStale {
		said += " (out of office)"
	}
	return fmt.Sprintf("%s level %d: %s %s", what, op.Level, said, op.Why)
}

// register is one key. An ambiguous write takes place when the checker says so, at the very end if it never did.
var register = porcupine.Model{
	Init: func() any { return Version(0) },
	Step: func(state, input, _ any) (bool, any) {
		now, op := state.(Version), input.(Op)
		holds := holdsIn(now, op)
		switch {
		case op.Kind == Get:
			return now == op.Found, now
		case op.Outcome == Refused && op.Kind == Swap:
			return !holds && op.Missing == (now == 0), now
		case op.Outcome == Refused:
			return !holds, now
		case op.Outcome == Ambiguous && !holds:
			return true, now
		}
		return holds, op.Writes
	},
	DescribeOperation: func(input, _ any) string { return input.(Op).String() },
	DescribeState:     func(state any) string { return fmt.Sprint(state) },
}

// holdsIn tells whether a write may be done now.
func holdsIn(now Version, op Op) bool {
	switch op.Kind {
	case Swap:
		return now == op.Expects
	case Add:
		return now == 0
	case Delete:
		return now != 0
	}
	return true
}

// counts tells whether the order has to explain it.
func (op Op) counts() bool {
	switch {
	case op.Outcome == Failed || op.Kind == Replica:
		return false
	case op.Outcome == Ambiguous:
		return op.Kind != Get
	case op.Kind == Get || op.Outcome == Refused:
		return !op.IsStale
	}
	return true
}

// checkMax is how long the search for an order of one key may take.
const checkMax = 30 * time.Second

// Check returns everything that the history shows to be wrong.
func Check(history []Op) error {
	keys := map[string][]Op{}
	for _, op := range history {
		keys[op.Key] = append(keys[op.Key], op)
	}
	var wrong []error
	for key, ops := range keys {
		wrong = append(wrong, checkVersions(key, ops), checkOrderSeen(key, ops), checkOrder(key, ops))
	}
	return errors.Join(wrong...)
}

func checkOrder(key string, ops []Op) error {
	var operations []porcupine.Operation
	for _, op := range ops {
		if !op.counts() {
			continue
		}
		if op.Outcome == Ambiguous {
			op.Return = math.MaxInt64
		}
		operations = append(operations,
			porcupine.Operation{ClientId: op.Client, Input: op, Call: op.Call, Return: op.Return})
	}
	switch porcupine.CheckOperationsTimeout(register, operations, checkMax) {
	case porcupine.Ok:
		return nil
	case porcupine.Unknown:
		return fmt.Errorf("%s: no order found in %v, nor that there is none", key, checkMax)
	}
	return fmt.Errorf("%s: no order explains these answers\n%s", key, listing(ops))
}

// checkVersions holds every version seen, wherever, to one that somebody wrote, with one CAS.
func checkVersions(key string, ops []Op) error {
	written := map[Version]Op{}
	cas := map[Version]uint64{}
	for _, op := range ops {
		if op.Writes != 0 && (op.Outcome == Done || op.Outcome == Ambiguous) {
			written[op.Writes] = op
			if op.Outcome == Done {
				cas[op.Writes] = op.Cas
			}
		}
	}
	for _, op := range ops {
		if op.Found == 0 || op.Outcome != Done {
			continue
		}
		if write, known := written[op.Found]; !known || write.Call > op.Return {
			return fmt.Errorf("%s: version %d was invented: %v\n%s", key, op.Found, op, listing(ops))
		}
		if known, seen := cas[op.Found]; seen && known != op.Cas {
			return fmt.Errorf("%s: version %d has CAS %x, and %x at %v\n%s", key, op.Found, known, op.Cas, op, listing(ops))
		}
		cas[op.Found] = op.Cas
	}
	return nil
}

// checkOrderSeen holds every node to show commits in their order, also one whose answers do not count otherwise: who has read
// a version there does not read an older one later, as long as the node lives and keeps its office.
func checkOrderSeen(key string, ops []Op) error {
	type place struct {
		node string
		term int
		kind Kind
	}
	reads := map[place][]Op{}
	for _, op := range ops {
		if op.Found != 0 && op.Outcome == Done {
			at := place{op.Node, op.Term, op.Kind}
			reads[at] = append(reads[at], op)
		}
	}
	for at, ops := range reads {
		sort.Slice(ops, func(a, b int) bool { return ops[a].Return < ops[b].Return })
		for n, later := range ops {
			// The newest of all that were answered before this one was asked.
			for _, before := range ops[:n] {
				if before.Return < later.Call && before.Cas > later.Cas {
					return fmt.Errorf("%s: %s went back from version %d to %d\n%s",
						key, at.node, before.Found, later.Found, listing(ops))
				}
			}
		}
	}
	return nil
}

func listing(ops []Op) string {
	sort.Slice(ops, func(a, b int) bool { return ops[a].Call < ops[b].Call })
	var text strings.Builder
	for _, op := range ops {
		fmt.Fprintf(&text, "  %12.6f to %12.6f s  client %2d at %s: %v\n",
			float64(op.Call)/1e9, float64(op.Return)/1e9, op.Client, op.Node, op)
	}
	return text.String()
}
