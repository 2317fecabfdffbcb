package histories

import (
	"testing"
	"time"
)

// all levels hold as long as a majority of nodes keeps what it has in memory, or the one that lost it is failed over.
var all = []uint8{1, 2, 3}

// onDisk are the levels that outlive the memory of an active that comes back as the active.
var onDisk = []uint8{2, 3}

// standstill is longer than any client waits.
const standstill = 10 * time.Second

func TestAReplicaIsKilledAndComesBack(t *testing.T) {
	twoAndThree(t, firstHasAll, all, func(s *scene) {
		for range 3 {
			s.kill(1)
			s.lasts(time.Second)
			s.must(s.restart(1))
			s.writes(150)
		}
	})
}

func TestAnActiveIsKilledAndComesBack(t *testing.T) {
	twoAndThree(t, firstHasAll, onDisk, func(s *scene) {
		for range 3 {
			s.kill(0)
			s.lasts(500 * time.Millisecond)
			s.must(s.restart(0))
			s.writes(150)
		}
	})
}

func TestAllAreKilledAtOnceAndComeBack(t *testing.T) {
	twoAndThree(t, spread, onDisk, func(s *scene) {
		for range 3 {
			everybody := s.dice.Perm(len(s.nodes))
			s.kill(everybody...)
			for _, number := range everybody {
				s.must(s.restart(number))
			}
			s.writes(150)
		}
	})
}

// Of two nodes the other one is left alone, with all that was acknowledged; of three two go on. The lost one comes back with what
// it had, and serves nothing.
func TestAKilledNodeIsFailedOverAndComesBack(t *testing.T) {
	twoAndThree(t, spread, all, func(s *scene) {
		lost, through := s.pair()
		s.kill(lost)
		_ = s.nodes[lost].gone()
		s.must(s.failOver(lost, through))
		s.goesOn()
		s.must(s.start(lost))
		s.stepsDown(lost, true)
		s.goesOn()
	})
}

// It is taken in again, and gets vBuckets while they are used. What it had before is nobody's truth any more.
func TestALostNodeIsTakenInAgain(t *testing.T) {
	twoAndThree(t, spread, all, func(s *scene) {
		lost, through := s.pair()
		s.kill(lost)
		_ = s.nodes[lost].gone()
		s.must(s.failOver(lost, through))
		s.goesOn()
		s.must(s.start(lost))
		s.stepsDown(lost, true)
		s.must(s.takeIn(lost, through))
		s.writes(150)
		s.kill(through)
		_ = s.nodes[through].gone()
		s.must(s.failOver(through, lost))
		s.goesOn()
	})
}

func TestANodeStandsStill(t *testing.T) {
	twoAndThree(t, spread, all, func(s *scene) {
		still, _ := s.pair()
		s.standStill(still)
		s.lasts(standstill)
		s.goOn(still)
		s.writes(150)
	})
}

// It wakes up and believes that it is active.
func TestANodeThatStandsStillIsFailedOver(t *testing.T) {
	twoAndThree(t, spread, all, func(s *scene) {
		still, through := s.pair()
		s.standStill(still)
		s.must(s.failOver(still, through))
		s.lasts(standstill)
		s.goOn(still)
		s.goesOn()
		s.acknowledgesNothing(still)
		s.stepsDown(still, false)
	})
}

func TestANodeIsCutOff(t *testing.T) {
	needsNetwork(t)
	twoAndThree(t, spread, all, func(s *scene) {
		alone, _ := s.pair()
		for range 2 {
			s.isolate(alone)
			s.lasts(4 * time.Second)
			s.heal()
			s.writes(150)
		}
	})
}

func TestANodeHearsNothing(t *testing.T) {
	needsNetwork(t)
	twoAndThree(t, spread, all, func(s *scene) {
		deaf, other := s.pair()
		s.mute(other, deaf)
		s.lasts(4 * time.Second)
		s.heal()
		s.writes(150)
		s.mute(deaf, other)
		s.lasts(4 * time.Second)
		s.heal()
		s.writes(150)
	})
}

// Clients reach both sides all the time.
func TestANodeThatIsCutOffIsFailedOver(t *testing.T) {
	needsNetwork(t)
	twoAndThree(t, spread, all, func(s *scene) {
		alone, through := s.pair()
		s.isolate(alone)
		s.lasts(time.Second)
		s.must(s.failOver(alone, through))
		s.goesOn()
		s.acknowledgesNothing(alone)
		s.heal()
		s.goesOn()
		s.acknowledgesNothing(alone)
		s.stepsDown(alone, false)
	})
}

// A majority that is on both sides of a cut acknowledges for one side only.
func TestANodeIsFailedOverThatOnlyOneOtherCannotReach(t *testing.T) {
	needsNetwork(t)
	play(t, 3, 2, spread, all, func(s *scene) {
		lost, through := s.pair()
		s.cut(lost, through)
		s.must(s.failOver(lost, through))
		s.goesOn()
		s.acknowledgesNothing(lost)
		s.heal()
		s.goesOn()
		s.acknowledgesNothing(lost)
		s.stepsDown(lost, false)
	})
}

// One thing after the other, and then a failover.
func TestWhateverMayHappen(t *testing.T) {
	needsNetwork(t)
	play(t, 3, 2, spread, onDisk, func(s *scene) {
		for range 6 {
			one, other := s.pair()
			switch s.dice.IntN(4) {
			case 0:
				s.kill(one)
				s.must(s.restart(one))
			case 1:
				s.standStill(one)
				s.lasts(time.Second)
				s.goOn(one)
			case 2:
				s.cut(one, other)
				s.kill(other)
				s.must(s.restart(other))
				s.heal()
			default:
				s.isolate(one)
				s.lasts(time.Second)
				s.heal()
			}
			s.writes(60)
		}
		lost, through := s.pair()
		s.kill(lost)
		_ = s.nodes[lost].gone()
		s.must(s.failOver(lost, through))
		s.goesOn()
	})
}

// pair draws a node and another.
func (s *scene) pair() (int, int) {
	drawn := s.dice.Perm(len(s.nodes))
	return drawn[0], drawn[1]
}

// isolate cuts a node off from all others.
func (s *scene) isolate(alone int) {
	s.Helper()
	for other := range s.nodes {
		if other != alone {
			s.cut(alone, other)
		}
	}
}

// goesOn waits for durable writes where a majority is left, and for a while where there is none.
func (s *scene) goesOn() {
	s.Helper()
	if len(s.nodes) > 2 {
		s.writes(150)
	} else {
		s.lasts(2 * time.Second)
	}
}

// acknowledgesNothing asks a node that is out of office for durable writes of every vBucket it once was active for.
func (s *scene) acknowledgesNothing(number int) {
	s.Helper()
	stubborn := s.load.client(clientCount + 1)
	for n := range vbuckets {
		name, vb := key(n)
		op := stubborn.ask(number, vb, Op{Key: name, Kind: Set, Level: 1, Writes: Version(s.load.versions.Add(1))})
		if op.Outcome == Done {
			s.Errorf("a node out of office acknowledged: %v", op)
		}
	}
	stubborn.leave()
}

// stepsDown waits until a node that is out of office, and can reach the others, knows it. From a restart on it serves nothing
// before it knows.
func (s *scene) stepsDown(number int, isRestarted bool) {
	s.Helper()
	witness := s.load.client(clientCount + 2)
	defer witness.leave()
	until := time.Now().Add(patience)
	for vb := 0; vb < vbuckets; time.Sleep(pace) {
		name, _ := key(vb)
		op := witness.ask(number, vb, Op{Key: name, Kind: Get})
		switch {
		case op.Why == notMine:
			vb++
		case isRestarted && op.Outcome == Done:
			s.Fatalf("a node that came back out of office serves: %v", op)
		case time.Now().After(until):
			s.Fatalf("after %v a node out of office does not know it: %v", patience, op)
		}
	}
}

func needsNetwork(t *testing.T) {
	t.Helper()
	if withoutNetwork != "" {
		t.Skip("nodes cannot be cut off from each other: ", withoutNetwork)
	}
}
